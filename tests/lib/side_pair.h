/* Connected sockets and counted descriptors, for the tests of proto/share/fdpass.h. */
#ifndef SHD_SIDE_PAIR_H
#define SHD_SIDE_PAIR_H

#include <unistd.h>

#include "proto/share/fdpass.h"
#include "tests/lib/test.h"

int fds_open(void);

struct side_msg msg_of(uint32_t type);

void pair_new(int ret_fds[2]);

void pair_free(const int fds[2]);

int child_status(pid_t pid);

#endif
