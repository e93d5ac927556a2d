// Every FFI handler of the extension. A handler never throws, synchronises or allocates.
#pragma once

#include "xla/ffi/api/ffi.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(AttnDistFwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(IndexerLogitsFwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(IndexerTopkBwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(IndexerTopkFwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(QuantizeFp8);
XLA_FFI_DECLARE_HANDLER_SYMBOL(SparseMlaBwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(SparseMlaDecode);
XLA_FFI_DECLARE_HANDLER_SYMBOL(SparseMlaFwd);
XLA_FFI_DECLARE_HANDLER_SYMBOL(TopkFwd);
