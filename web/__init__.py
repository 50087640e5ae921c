"""The page and the HTTP routes. Knows no torch and no queue: it submits and reads the database.

Importing anything of it switches off the reports that Gradio and the hub client send home; both read this when they are
imported, so it stands here, before either.
"""

import os

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
