/* The version of every program and library of this tree; CMakeLists.txt and client/shd.h agree
 * (tests/unit/client/test_public_header.c). */
#ifndef SHD_VERSION_H
#define SHD_VERSION_H
#define SHARDD_VERSION "0.1.0"

/* How shardd exits when it was drained, for managers that start it again after any other end (no
 * number that systemd has a name for). */
#define SHARDD_EXIT_DRAINED 10

/* How it exits when it was asked for what is wrong or not here: another try ends the same way. */
#define SHARDD_EXIT_USAGE 2
#endif
