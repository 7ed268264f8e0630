import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;

import org.zeromq.SocketType;
import org.zeromq.ZContext;
import org.zeromq.ZMQ;
import org.zeromq.ZMsg;

/**
 * A durable subscriber in Java, written from docs/proxy.md. It prints what it got and what is acknowledged.
 *
 * Arguments: endpoint, name, the id after which it ends. The language is that of Java 7, which Janino compiles.
 */
public class DurableClient {
    private static final long CREDIT = 100;
    private static final int ACK_EVERY = 50;
    private static final int SILENCE_MS = 3000;

    public static void main(String[] arguments) throws InterruptedException {
        String name = arguments[1];
        long last = Long.parseLong(arguments[2]);
        ZContext context = new ZContext();
        ZMQ.Socket socket = context.createSocket(SocketType.DEALER);
        // One connection in a hundred of JeroMQ 0.6.0 never shakes hands; after this it is made anew, not after 30 s.
        socket.setHandshakeIvl(SILENCE_MS);
        socket.connect(arguments[0]);
        ZMQ.Poller poller = context.createPoller(1);
        poller.register(socket, ZMQ.Poller.POLLIN);

        long session = 0;
        byte[] resume = new byte[0];
        boolean subscribe = true;
        boolean silent = false;
        boolean ready = false;
        long taken = 0;
        while (true) {
            if (subscribe) {
                session++;
                ready = false;
                taken = 0;
            }
            if (subscribe || silent) { // after silence the same again, which restarts nothing
                send(socket, "SUBSCRIBE", text("1"), text(name), number(session), text("earliest"), resume,
                        number(CREDIT));
            }
            subscribe = false;
            silent = poller.poll(SILENCE_MS) == 0;
            if (silent) {
                continue;
            }
            ZMsg message = ZMsg.recvMsg(socket);
            String word = message.popString();
            if (word.equals("READY")) {
                ready = ready || value(message.pop().getData()) == session;
            } else if (word.equals("MESSAGE") && ready) {
                long id = value(message.pop().getData());
                String body = new String(message.getLast().getData(), StandardCharsets.UTF_8);
                if (!body.equals(Long.toString(id))) {
                    throw new IllegalStateException("id " + id + " has the value " + body);
                }
                say("got " + id);
                Thread.sleep(1); // so that there is a middle to be killed in
                resume = number(id + 1);
                taken++;
                if (taken % ACK_EVERY == 0 || id == last) {
                    send(socket, "ACK", number(id));
                    send(socket, "CREDIT", number(taken));
                    taken = 0;
                }
            } else if (word.equals("ACKED")) {
                long acknowledged = value(message.pop().getData()) - 1;
                say("acked " + acknowledged);
                if (acknowledged >= last) {
                    send(socket, "CLOSE");
                    context.close();
                    return;
                }
            } else if (word.equals("REFUSED")) {
                String code = message.popString();
                if (!code.equals("unknown")) {
                    throw new IllegalStateException(code + ": " + message.popString());
                }
                subscribe = ready;
            } else if (word.equals("LOST")) {
                say("lost " + value(message.pop().getData()) + " to " + value(message.pop().getData()));
            }
        }
    }

    private static void send(ZMQ.Socket socket, String word, byte[]... frames) {
        ZMsg message = new ZMsg();
        message.add(word);
        for (int i = 0; i < frames.length; i++) {
            message.add(frames[i]);
        }
        message.send(socket);
    }

    private static byte[] text(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    private static byte[] number(long number) {
        return ByteBuffer.allocate(8).putLong(number).array();
    }

    private static long value(byte[] number) {
        return ByteBuffer.wrap(number).getLong();
    }

    private static void say(String line) {
        System.out.println(line);
        System.out.flush();
    }
}
