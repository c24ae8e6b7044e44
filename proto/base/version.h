/* The version of every program and library of this tree; CMakeLists.txt and client/shd.h agree
 * (tests/unit/client/test_public_header.c). */
#ifndef SHD_VERSION_H
#define SHD_VERSION_H
#define SHARDD_VERSION "0.1.0"

/* shardd's exit status when it was drained, for managers that start it again after any other end.
 * It is no number that systemd has a name for. */
#define SHARDD_EXIT_DRAINED 10

/* Its exit status when it was asked for something wrong or not here: a restart would not help. */
#define SHARDD_EXIT_USAGE 2
#endif
