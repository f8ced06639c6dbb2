"""The step header: int64 words that say what one forward pass works on. Kernels read them by these byte offsets."""

TOKENS = 0
"""Rows of the batch."""
OUTPUTS = 8
"""Rows whose logits are wanted."""
TOKEN_IDS = 16
"""Address: int32 token id of each row."""
POSITIONS = 24
"""Address: int32 position of each row in its sequence."""
TABLES = 32
"""Address: for each row the address of its sequence's block table (int32)."""
OUTPUT_ROWS = 40
"""Address: int32 row number of each output."""
KV = 48
"""Address of the KV pool."""
KV_BLOCK = 56
"""Bytes of a pool block, all layers."""
TILES = 64
"""Address: int32 pairs (first row, rows) of up to attention_sizes.TILE_ROWS successive rows of one sequence."""
N_TILES = 72
ROPE = 80
"""Addresses of up to eight tables of rotary angles, float32 [position][n_rot/2 cosines, n_rot/2 sines]."""
PARTS = 144
"""Into how many parts attention over one row is shared out; 1: one thread does all of a row's."""
PARTIAL = 152
"""Address of what the parts give, see attention.py."""
SLOTS = 160
"""Address of slot 0 of recurrent state (slots.py)."""
SLOT_BYTES = 168
SPANS = 176
"""Address: int32 triples (slot, number of the first segment, segments) of each span."""
SEGMENTS = 184
"""Address: int32 triples (first row, rows, slot that the state is copied to after them, or -1)."""
SIZE = 192
