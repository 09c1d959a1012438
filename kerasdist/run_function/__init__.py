"""`kerasdist.run(function, n=4)`: a function as a job's script, and its results.

Here: what travels to the workers and back, and the process of the launcher. Not here:
the launcher itself, `kerasdist run`, which is started as a command: this process may
have TensorFlow's threads, and can't be forked. Needs neither TensorFlow nor Keras.
"""
