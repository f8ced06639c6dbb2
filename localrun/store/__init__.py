"""Models on disk: names, blobs, manifests, the catalogue, pulls and Modelfiles. Knows nothing of engines or HTTP routes."""

from localrun.store.progress import PullProgress
from localrun.store.store import Store, StoredModel

__all__ = ["PullProgress", "Store", "StoredModel"]
