"""How families of models mark what they think before they answer."""
