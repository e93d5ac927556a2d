"""Calls of other libraries, one module per library.

Each function takes the benchmark case and its arguments, and calls the library through its public
Python interface. A function whose name ends with `operands` prepares the arguments outside the
measured time. Libraries are imported inside the functions, because any of them may be missing.
"""
