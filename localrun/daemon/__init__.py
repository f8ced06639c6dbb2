"""The daemon: HTTP in, runner processes out. It owns the lifetimes: of connections, of requests, of loaded models. Knows no kernel, no
tokenizer and no template: those live in the runners."""
