"""Checks of everything that only an accelerator can show, in two calls of under ten minutes each (`make gpu`)."""
