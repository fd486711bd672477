"""Decisions about failures: who is lost, who runs again, when a watchdog acts."""
