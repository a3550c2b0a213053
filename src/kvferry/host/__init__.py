"""What this machine lends us: files of this user's alone, memory that others see, perhaps a compiler."""
