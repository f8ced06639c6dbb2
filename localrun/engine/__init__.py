"""The engine inside a runner process: block pool, scheduler, sampler, step. Knows models as `models.model.Model`; knows nothing of HTTP."""
