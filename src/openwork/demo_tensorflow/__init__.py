"""The main job on scikit-learn's digits, with a TensorFlow graph."""
