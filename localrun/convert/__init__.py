"""Checkpoints as Hugging Face lays them out, turned into GGUF files: safetensors, config.json and tokenizer files in, one file out.

Runs in a process of its own (`python -m localrun.convert`)."""
