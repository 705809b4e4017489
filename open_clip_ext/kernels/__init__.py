"""What the losses compute with: passes over similarities that are never held whole."""
