"""Nothing here is a test: other tests import it where vLLM is, or a person runs it."""

collect_ignore_glob = ["*.py"]
