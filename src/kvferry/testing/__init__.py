"""What kvferry's own tests are made of, shipped for yours: the oracle, strategies, small engines."""
