/* The view as a key of etcd v3, by its HTTP gateway: arbiter.h's etcd:URL/PREFIX. */
#ifndef SHD_ARBITER_ETCD_H
#define SHD_ARBITER_ETCD_H

struct arbiter_place;
struct shd_err;

#define ARBITER_ETCD_URLS_MAX 8u

/* where: "http://a:2379,http://b:2379/PREFIX", members of one etcd. Errors: SHD_EINVAL it is not
 * that, SHD_ERANGE too long or too many, SHD_ENOTSUP no libcurl here, SHD_ENOMEM. */
int arbiter_etcd_open(const char *where, const char *cluster, struct arbiter_place *ret_place,
                      struct shd_err *e);

#endif
