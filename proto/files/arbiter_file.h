/* Views as files of a directory that all hosts have: arbiter.h's file:DIR. */
#ifndef SHD_ARBITER_FILE_H
#define SHD_ARBITER_FILE_H

struct arbiter_place;
struct shd_err;

/* So many views before the newest are kept, to be read by people. */
#define ARBITER_FILE_KEPT 16u

/* Errors: SHD_EINVAL the path is not absolute, SHD_ERANGE too long, SHD_ENOMEM. */
int arbiter_file_open(const char *dir, const char *cluster, struct arbiter_place *ret_place,
                      struct shd_err *e);

#endif
