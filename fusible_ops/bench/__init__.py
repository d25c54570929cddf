"""What `fusible-ops bench` runs: the layer and its parts, peers, timing, and what is made of the figures."""
