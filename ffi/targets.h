// Every FFI handler of the extension. A handler never throws, synchronises or allocates.
#pragma once

#include "xla/ffi/api/ffi.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(QuantizeFp8);
