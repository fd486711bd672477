"""The keeper: one light process per node that owns the slots and outlives the trainers; and its client. No torch."""
