"""Under names that another file can give back."""

NativeCcInfo = CcInfo  # buildifier: disable=native-cc-info
