"""Text in and out of token ids: tokenizers, chat templates, streaming detokenization. Knows nothing of engines or HTTP."""
