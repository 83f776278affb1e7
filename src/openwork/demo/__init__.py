"""``openwork demo``: the main job from training to the measured smaller file, on data that comes with scikit-learn."""
