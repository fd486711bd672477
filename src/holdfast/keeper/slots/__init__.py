"""The slots of a node: allocation, sealing, twins and the state of the keeper."""
