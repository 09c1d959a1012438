"""The lines that TensorFlow writes when it is imported, kept from the terminal.

`TF_CPP_MIN_LOG_LEVEL=1` silences most of them. The rest is written before TensorFlow's
log exists, whatever the level: these lines alone are taken out of what is shown.
"""
