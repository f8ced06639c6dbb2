"""The dialects: request bodies in, `messages.Generate` out; runner events in, reply chunks out. Pure functions of JSON-like values:
no HTTP, no processes, no files. Knows neither the daemon that serves it nor the engine that answers."""
