"""Everything that a script's loop can reach and that no `state_dict` hands out."""
