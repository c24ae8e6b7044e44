/* `shardctl show`: what the tensors of a model that is being trained come to. */
#ifndef SHD_CTL_SHOW_H
#define SHD_CTL_SHOW_H

#include "client/ctl/base/verb.h"

int verb_show(int argc, char **argv);

#endif
