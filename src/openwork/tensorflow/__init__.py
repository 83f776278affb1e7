"""TensorFlow: the same system on tf.Graph."""
