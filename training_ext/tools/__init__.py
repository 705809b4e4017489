"""Commands over files and checkpoints; nothing that trains imports them."""
