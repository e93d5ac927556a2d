"""Training experiments whose results the documentation reports. They are not part of the wheel."""
