"""Pictures of plans and manifests: values (``bands``, ``blocks``), shapes, templates, a file (``render``)."""
