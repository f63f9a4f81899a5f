"""What requests and steps add up to: plain numbers, for whoever shows them."""
