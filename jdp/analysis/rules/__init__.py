"""How each kind of primitive changes what is known of its operands."""
