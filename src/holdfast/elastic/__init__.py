"""The launcher's side: processes, rendezvous, workers and the watchdog."""
