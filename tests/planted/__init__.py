"""Bugs planted on purpose, which the drills have to find: a checker that cannot fail proves nothing."""
