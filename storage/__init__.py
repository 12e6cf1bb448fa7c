"""Block stores: media that hold equal blocks of bytes. They know nothing of tokens or of each other."""
