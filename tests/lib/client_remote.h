/* What tests of the mapped path share: real daemons, attached to, with the toy model. */
#ifndef SHD_CLIENT_REMOTE_H
#define SHD_CLIENT_REMOTE_H

#include "tests/lib/client_toy.h"
#include "tests/lib/fixture.h"
#include "tests/lib/test.h"

extern struct fixture daemons;

/* For sessions whose limit is not what the test is about: the machine may be busy. */
#define PATIENT_MS TEST_HANG_MS

int try_connect(const char *address, uint64_t timeout_ms, shd_session **ret, struct shd_err *e);

shd_session *attach(uint64_t timeout_ms);

shd_model *open_toy(shd_session *s, const char *spec);

void digest_of(shd_model *m, char hex[65]);

/* After a test that killed one: the others too, and what they leave. */
void remove_dead_fixture(void);

#endif
