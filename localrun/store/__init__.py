"""Models on disk: names, blobs, manifests, the catalogue, pulls and Modelfiles. Knows nothing of engines or HTTP routes."""

from localrun.store.create import CreateSpec, modelfile_for, spec_from_modelfile
from localrun.store.progress import PullProgress
from localrun.store.store import Store, StoredModel

__all__ = ["CreateSpec", "PullProgress", "Store", "StoredModel", "modelfile_for", "spec_from_modelfile"]
