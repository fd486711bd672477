"""The suite on other releases: of torch, of Python, of the frameworks that holdfast is used through."""
