"""Pictures of plans and of manifests: values first, then shapes, then templates, then a file.

``bands`` and ``blocks`` say what is drawn, ``shapes`` where, ``templates/`` how; ``render`` is the only file
that imports Jinja.
"""
