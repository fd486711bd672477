"""The model of pipeline schedules, their bubbles and what fits into them."""
