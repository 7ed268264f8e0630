/* A durable subscriber in C with libzmq, written from docs/proxy.md. It prints what it got and what is acknowledged.
 *
 * Arguments: endpoint, name (without quotes and backslashes), the id after which it ends.
 */
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <zmq.h>

enum { SILENCE_MS = 3000, MOST_FRAMES = 8 };
enum { HEAD, JSON, IDS }; /* the first frames of an answer */

static void *dealer;
static int64_t session;
static zmq_msg_t frames[MOST_FRAMES]; /* the answer */
static char *json;                    /* its JSON object */

/* A number of the JSON object, in which there is no other object. */
static int64_t number(const char *field, int64_t otherwise) {
    char key[32];
    snprintf(key, sizeof key, "\"%s\":", field);
    char *place = strstr(json, key), *end = NULL;
    int64_t value = place ? strtoll(place += strlen(key), &end, 10) : 0;
    return end == place ? otherwise : value; /* it is not there, or null */
}

/* Integer i of a frame, in which each one has so many bytes. */
static int64_t integer(int frame, int i, int width) {
    const unsigned char *bytes = (unsigned char *)zmq_msg_data(&frames[frame]) + (size_t)i * width;
    uint64_t value = 0;
    while (width--)
        value = value << 8 | bytes[width];
    return (int64_t)value;
}

/* Entry i of the column whose offsets and data are in these frames, as the last arguments of printf("%.*s"). */
#define ENTRY(offsets, i) \
    (int)(integer(offsets, (i) + 1, 4) - integer(offsets, i, 4)), \
        (char *)zmq_msg_data(&frames[(offsets) + 1]) + integer(offsets, i, 4)

static void receive(void) {
    int more = 1;
    for (int i = 0; i < MOST_FRAMES; i++) { /* no answer has more frames */
        zmq_msg_close(&frames[i]);
        zmq_msg_init(&frames[i]);
        if (more)
            zmq_msg_recv(&frames[i], dealer, 0);
        more = zmq_msg_more(&frames[i]);
    }
    if (zmq_msg_size(&frames[HEAD]) != 5 || memcmp(zmq_msg_data(&frames[HEAD]), "ZDS\2", 4)) {
        fprintf(stderr, "no message of version 2\n");
        exit(1);
    }
    free(json);
    json = strndup(zmq_msg_data(&frames[JSON]), zmq_msg_size(&frames[JSON]));
}

/* Sends a request until its answer is there; returns the letter of the answer. */
static char ask(char kind, const char *request, int64_t first) {
    const char head[] = {'Z', 'D', 'S', 2, kind};
    for (;;) {
        zmq_send(dealer, head, sizeof head, ZMQ_SNDMORE);
        zmq_send(dealer, request, strlen(request), 0);
        zmq_pollitem_t item = {dealer, 0, ZMQ_POLLIN, 0};
        while (zmq_poll(&item, 1, SILENCE_MS) > 0) {
            receive();
            char answer = ((char *)zmq_msg_data(&frames[HEAD]))[4];
            if (number("session", session) != session)
                continue;
            if (answer == 'X') {
                fprintf(stderr, "%s\n", json);
                exit(1);
            }
            if (number("first", -1) == first) /* OPENED has none */
                return answer;
        }
    }
}

static void print_messages(int64_t last) {
    int rows = (int)number("rows", 0), is_whole = strstr(json, "\"columns\":[\"frames\"]") != NULL;
    for (int i = 0; i < rows && integer(IDS, i, 8) <= last; i++) {
        printf("got %" PRId64 " ", integer(IDS, i, 8));
        if (is_whole) { /* ids, offsets of the messages, offsets of the frames, the frames */
            int begin = (int)integer(3, i, 4), end = (int)integer(3, i + 1, 4);
            printf("%.*s ", ENTRY(4, end - 1));
            if (end - begin > 1)
                printf("%.*s", ENTRY(4, begin));
        } else { /* ids, validity of the topics, their offsets, they, the offsets of the values, they */
            printf("%.*s ", ENTRY(6, i));
            if (!zmq_msg_size(&frames[3]) || integer(3, i / 8, 1) >> i % 8 & 1)
                printf("%.*s", ENTRY(4, i));
        }
        printf("\n");
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL); /* so that there is a middle to be killed in */
    }
}

int main(int count, char **arguments) {
    if (count != 4)
        return 2;
    const char *name = arguments[2];
    int64_t last = strtoll(arguments[3], NULL, 10), first, done;
    uint32_t client = 0;
    FILE *random = fopen("/dev/urandom", "rb");
    while (!client && random && fread(&client, sizeof client, 1, random))
        client &= INT32_MAX;
    session = (int64_t)client << 32 | 1;
    setvbuf(stdout, NULL, _IOLBF, BUFSIZ);
    void *context = zmq_ctx_new();
    dealer = zmq_socket(context, ZMQ_DEALER);
    zmq_setsockopt(dealer, ZMQ_LINGER, &(int){0}, sizeof(int));
    zmq_connect(dealer, arguments[1]);

    char request[512];
    snprintf(request, sizeof request, "{\"name\":\"%s\",\"session\":%" PRId64 ",\"start\":\"earliest\"}", name, session);
    ask('O', request, -1);
    first = done = number("next", 0);
    while (done <= last) { /* until the proxy has on its disk that all are acknowledged */
        const char *more = first > last ? "\"max_bytes\":0,\"confirm\":true" : "\"max_bytes\":4096,\"wait\":1000";
        snprintf(request, sizeof request, "{\"name\":\"%s\",\"session\":%" PRId64 ",\"first\":%" PRId64
                 ",\"done\":%" PRId64 ",%s}", name, session, first, first, more);
        if (ask('F', request, first) == 'L')
            printf("lost %" PRId64 " to %" PRId64 "\n", first, number("next", 0) - 1);
        else
            print_messages(last);
        if (number("done", 0) > done)
            printf("acked %" PRId64 "\n", (done = number("done", 0)) - 1);
        first = number("next", 0) <= last ? number("next", 0) : last + 1;
    }
    zmq_close(dealer);
    zmq_ctx_term(context);
    return 0;
}
