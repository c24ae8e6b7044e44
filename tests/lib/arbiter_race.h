/* Processes that claim views of one arbiter at the same time. */
#ifndef SHD_TESTS_ARBITER_RACE_H
#define SHD_TESTS_ARBITER_RACE_H

#include <stdint.h>

#define ARBITER_RACE_VIEWS_MAX 100u

/* Eight processes claim what comes next until there are so many views: one makes each, and a view
 * that was read never comes back. The test fails otherwise. */
void expect_one_makes_each_view(const char *text, const char *cluster, uint32_t views);

#endif
