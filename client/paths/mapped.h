/* Reading parameters in place: owners' memory is mapped, side by side, or of one owner whole. */
#ifndef SHD_MAPPED_H
#define SHD_MAPPED_H

#include "client/paths/path.h"

extern const struct reader_ops reader_mapped;

#endif
