"""What the tests are written with: strategies, an oracle, and gloo processes to run cases in."""
