"""Block stores: media that hold equal blocks of bytes, and know nothing of tokens."""
