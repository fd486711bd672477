"""Messages between trainers and keepers, and how a keeper is started and called."""
