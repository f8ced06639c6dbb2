"""Models on disk: names, blobs, manifests, the catalogue, pulls and Modelfiles. Knows nothing of engines or HTTP routes."""
