"""The documentation site: see website/mkdocs.yml."""
