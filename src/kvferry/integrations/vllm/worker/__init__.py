"""The part of the connector that runs in each vLLM worker."""
